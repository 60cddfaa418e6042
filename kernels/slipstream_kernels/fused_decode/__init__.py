"""All layers of a decode step in one launch.

Contracts here; cuda/ (host part, choice of variant), reference/ (torch).
"""
