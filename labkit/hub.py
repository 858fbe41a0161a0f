"""Whether the Hugging Face hub can be asked, found out once and quickly.

The hub's client retries an unreachable host for half a minute, printing as it goes; a machine
without a network should hear one sentence at once instead.
"""

from functools import cache


@cache
def hub_reachable() -> bool:
    """Whether the hub answers within five seconds; proxies and ``HF_HUB_OFFLINE`` count."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=5)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True
