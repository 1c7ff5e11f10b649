"""OpenAI's API: requests parsed, responses formatted."""
