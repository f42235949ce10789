"""Removes secrets of addresses from texts for people: errors, log lines, pages and lists of settings.

    https://ann:S3cret@models/ranker?X-Amz-Signature=ab   ->   https://***@models/ranker?***

Libraries quote addresses in the texts of their exceptions, so any text may be given.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

_PORT: Final = r"\d{1,5}(?:[/?#,'\"\s]|$)"
_USER: Final = re.compile(
    # Of an address with a scheme: up to the last @ before the path.
    r"(?<=://)[^\s/?#]*@"
    # A password that is not percent-encoded as it should be: no port follows the colon, so the last @ ends it.
    rf"|(?<=://)[^\s/?#@:\[]*:(?!\s|{_PORT}).{{0,4000}}@"
    # An address without a scheme. A slash follows the colon of `models:/NAME@ALIAS`.
    r"|(?<![^\s,;='\"(])[^\s/?#@:,;='\"(]+:(?!/)\S{0,4000}@"
)
_QUERY: Final = re.compile(r"(://[^\s?]{0,1000}\?|\?(?=[^\s?=]{0,1000}=))[^\s'\"]*")
_LEAST_PART: Final = 4
"""Characters of the shortest part that is masked by itself: a shorter one is in other words, too."""


def masked(text: str, of: str = "") -> str:
    """The text, with `***` instead of each user, password and query of an address.

    `of`: addresses of which the text may quote parts, such as a piece of a password that was taken for a port.
    """
    text = _QUERY.sub(r"\1***", _USER.sub("***@", text))
    secrets = [part for user in _USER.findall(of) for part in re.split(r"[:/?#@]", user.partition(":")[2] or user)]
    secrets += re.findall(r"=([^&#\s]+)", _USER.sub("", of))
    for secret in sorted((each for each in secrets if len(each) >= _LEAST_PART), key=len, reverse=True):
        text = text.replace(secret, "***").replace(unquote(secret), "***")
    return text
