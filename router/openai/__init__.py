"""The OpenAI surface: requests parsed, answers formatted."""
