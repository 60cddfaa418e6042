"""Anthropic's Messages API over the gateway's chats."""
