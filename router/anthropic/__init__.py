"""Anthropic's Messages API: requests parsed, responses and errors formatted."""
