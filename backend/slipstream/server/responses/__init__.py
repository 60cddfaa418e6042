"""OpenAI's Responses API over the gateway's chats."""
