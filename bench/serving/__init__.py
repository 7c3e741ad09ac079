"""Load for servers that speak OpenAI's API, and what they make of it."""
