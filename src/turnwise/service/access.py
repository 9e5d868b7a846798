"""Who is calling: API keys, tokens that stand for keys, and signed links.

A key is 32 random bytes after a prefix that the SDKs accept. The store holds only its SHA-256, which is enough for a
secret that nobody can guess. A token is a JWT signed with the store's secret. It names a key; if the key is revoked,
its tokens become invalid.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.errors import ConfigError
from turnwise.service.failures import HttpFailure
from turnwise.service.store.store import KeyRow, Store

LOCAL_OWNER = "local"
"""The owner of everything that is created while there are no keys."""

KeyStyle = Literal["tml", "sk"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, who may use only its own objects."""

    owner: str
    name: str


def create_key(store: Store, name: str, style: KeyStyle = "tml") -> str:
    """Create a key and return it. It cannot be shown again."""
    if not name or len(name) > 100 or not name.isprintable():
        raise ConfigError(f"key name {name!r}; expected 1 to 100 printable characters")
    key = f"{style}-{secrets.token_urlsafe(32)}"
    store.add_key(name, _digest(key), key[-4:], time.time())
    return key


def revoke_key(store: Store, key_id: int) -> KeyRow:
    row = store.key_by_id(key_id)
    if row is None or not store.revoke_key(key_id, time.time()):
        known = ", ".join(f"{key.key_id} ({key.name})" for key in store.list_keys() if key.revoked_at is None)
        raise ConfigError(f"no key {key_id} to revoke; there are: {known or 'none'}")
    return row


class Access:
    """Identifies callers, and signs links that work without a key."""

    def __init__(self, store: Store, *, is_loopback: bool, token_s: float) -> None:
        self._store = store
        self._secret = store.secret
        self._is_loopback = is_loopback
        self._token_s = token_s

    def check_bind(self) -> None:
        """Refuse to listen on an address that other machines can reach while no key is needed."""
        if not self._is_loopback and not self._store.has_keys():
            raise ConfigError(
                "this address can be reached from other machines, and there is no API key yet; make one with "
                "`turnwise keys create --data-dir DIR NAME`, or listen on 127.0.0.1"
            )

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return self._is_loopback and not self._store.has_keys()

    def caller(self, credential: str | None) -> Caller:
        """The caller who sends this `X-API-Key`, which is a key or a token."""
        if self.is_open:
            return Caller(LOCAL_OWNER, LOCAL_OWNER)
        row = None
        if credential:
            row = self._by_token(credential) if credential.startswith("eyJ") else None
            row = row or self._store.key_by_digest(_digest(credential))
        if row is None:
            raise HttpFailure(401, "no valid API key; send one in X-API-Key (`turnwise keys create` makes them)")
        return Caller(str(row.key_id), row.name)

    def make_token(self, caller: Caller) -> str:
        now = int(time.time())
        claims = {
            "sub": caller.owner,
            "org_id": "turnwise",
            "email": f"{caller.owner}@localhost",
            "name": caller.name,
            "iat": now,
            "exp": now + int(self._token_s),
        }
        head = _encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
        signed = f"{head}.{_encode(json.dumps(claims).encode())}"
        return f"{signed}.{_encode(self._sign(b'token', signed))}"

    def _by_token(self, token: str) -> KeyRow | None:
        signed, _, signature = token.rpartition(".")
        claims = _decode_json(signed.partition(".")[2])
        if claims is None or not _same(signature, self._sign(b"token", signed)):
            return None
        key_id, expires = claims.get("sub"), claims.get("exp", 0)
        if expires < time.time() or not str(key_id).isdigit():
            return None
        return self._store.key_by_id(int(str(key_id)))

    def make_link(self, what: dict[str, str]) -> tuple[str, float]:
        """Make a token for one download; return it and the time when it expires."""
        expires = time.time() + self._token_s
        payload = _encode(json.dumps({**what, "exp": expires}).encode())
        return f"{payload}.{_encode(self._sign(b'link', payload))}", expires

    def read_link(self, token: str) -> dict[str, str]:
        payload, _, signature = token.partition(".")
        what = _decode_json(payload)
        if what is None or not _same(signature, self._sign(b"link", payload)) or what.get("exp", 0) < time.time():
            raise HttpFailure(404, "download not found; ask for a new link")
        return {str(key): str(value) for key, value in what.items()}

    def _sign(self, purpose: bytes, text: str) -> bytes:
        return hmac.new(self._secret, purpose + b"\0" + text.encode(), hashlib.sha256).digest()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _same(signature: str, expected: bytes) -> bool:
    return hmac.compare_digest(signature.encode("utf-8", "replace"), _encode(expected).encode())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_json(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error):
        return None
    return found if isinstance(found, dict) else None
