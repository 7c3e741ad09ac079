"""Which requests begin alike: the key that sends them to the replica that has their keys cached."""

import hashlib
import json
from typing import Any

PREFIX_CHARS = 512
"""Characters that are compared, four for a token: about two pages of 64 tokens."""


def prefix_key(body: bytes) -> str | None:
    """Return a name for the beginning of what a request asks, None if it asks nothing.

    Of a conversation the beginning ends with the first message of the user, so that it stays the
    same while the conversation goes on. Requests of different models or salts share no keys.

    Args:
        body: of the request, from anybody; what is wrong with it is for the replica to say.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    begins = _beginning(asked)
    if not begins:
        return None
    told = json.dumps([asked.get("cache_salt"), begins], ensure_ascii=True)
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _beginning(asked: dict[str, Any]) -> Any:
    """Return the beginning as JSON values, which need not be what they should be."""
    if messages := asked.get("messages"):
        return _first_turn(messages)
    if given := asked.get("input"):  # /v1/responses
        turns = given if isinstance(given, list) else [given]
        return _first_turn([asked.get("instructions"), *turns])
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt[: PREFIX_CHARS // 4] if isinstance(prompt, list) else _cut(prompt)


def _first_turn(messages: Any) -> Any:
    if not isinstance(messages, list):
        return _cut(messages)
    taken = []
    for message in messages:
        taken.append(message)
        if isinstance(message, dict) and message.get("role") == "user":
            break
    return _cut(taken)


def _cut(value: Any) -> str | None:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    return text[:PREFIX_CHARS] if value else None
