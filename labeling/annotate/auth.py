"""Who is signed in: hashed passwords, a throttle on guesses, and a signed cookie that survives a restart."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labeling.annotate.exchange import NAME
from prm.errors import DataError

SESSION_SECONDS = 14 * 86400
COST = {"n": 2**14, "r": 8, "p": 1}
ROLES = ("annotator", "reviewer")
FREE_GUESSES = 5
LONGEST_WAIT = 300.0  # seconds


@dataclass(frozen=True)
class User:
    """One person of the users file."""

    name: str
    password: str  # as `hash_password` makes it
    role: str = "annotator"


def hash_password(password: str, salt: bytes | None = None) -> str:
    """`scrypt:SALT:HASH` (hex): what stands in the users file.

    Raises:
        DataError: an empty password.
    """
    if not password:
        raise DataError("the password must not be empty")
    salt = salt or secrets.token_bytes(16)
    digest = hashlib.scrypt(password.encode("utf-8", "surrogatepass"), salt=salt, dklen=32, **COST)
    return f"scrypt:{salt.hex()}:{digest.hex()}"


def check_password(password: str, hashed: str) -> bool:
    """Whether a password has this hash; in a time that tells nothing."""
    salt = bytes.fromhex(hashed.split(":")[1])
    return bool(password) and hmac.compare_digest(hash_password(password, salt), hashed)


def read_users(path: str) -> dict[str, User]:
    """The users file: a table `[NAME]` a person, with `password = "scrypt:..."` and `role`, annotator if not given.

    Raises:
        DataError: the file cannot be read or a table is something else; the message names it.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path}: not TOML: {error}") from None
    users = {}
    for name, table in tables.items():
        where = f"{path}: [{name}]"
        if not NAME.fullmatch(name):
            raise DataError(f"{where}: a name is 1 to 64 letters, digits and . _ @ + -")
        if not isinstance(table, dict) or set(table) - {"password", "role"} or "password" not in table:
            raise DataError(f"{where}: expected a table with password and role")
        kind, _, rest = str(table["password"]).partition(":")
        salt, _, digest = rest.partition(":")
        if kind != "scrypt" or len(digest) != 64 or not _hex(salt) or not _hex(digest):
            raise DataError(f"{where}: password must be a hash as prm annotate --hash-password prints it")
        if table.get("role", ROLES[0]) not in ROLES:
            raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, got {table['role']!r}")
        users[name] = User(name, table["password"], table.get("role", ROLES[0]))
    if not users:
        raise DataError(f"{path}: names nobody; expected a table [NAME] with a password for each person")
    return users


class Throttle:
    """Counts wrong guesses of a name and of an address; after `FREE_GUESSES` each doubles the wait, up to 5 minutes.

    In memory: a restart forgets. While somebody must wait even the right password is refused, unheard.
    """

    def __init__(self) -> None:
        self._failed: dict[str, tuple[int, float]] = {}  # key -> (wrong guesses, seconds when the next is heard)
        self._lock = threading.Lock()

    def wait(self, *keys: str) -> float:
        """Seconds until the next guess is heard; counts this one as wrong until `passed` says otherwise."""
        now = time.monotonic()
        with self._lock:
            left = max((self._failed[k][1] - now for k in keys if k in self._failed), default=0.0)
            if left > 0:
                return left
            if len(self._failed) > 10_000:
                self._failed = {k: v for k, v in self._failed.items() if v[1] > now - LONGEST_WAIT}
            for key in keys:
                count, _ = self._failed.get(key, (0, 0.0))
                over = count + 1 - FREE_GUESSES
                self._failed[key] = (count + 1, now + min(2.0**over, LONGEST_WAIT) if over >= 0 else 0.0)
        return 0.0

    def passed(self, *keys: str) -> None:
        """The guess was right."""
        with self._lock:
            for key in keys:
                self._failed.pop(key, None)


class Sessions:
    """Makes and reads the cookie: name and time, signed with the project's secret and the person's password hash.

    So it outlives a restart, and ends when the password is changed or the person leaves the users file.
    """

    def __init__(self, secret: bytes, users: Mapping[str, User]) -> None:
        self._secret = secret
        self._users = users
        self._nobody = hash_password(secrets.token_hex(8))
        self._hashing = threading.BoundedSemaphore(2)  # a hash takes 16 MB

    def sign_in(self, name: str, password: str) -> str | None:
        """A cookie's value for the right password, else None; an unknown name takes as long as a known one."""
        user = self._users.get(name)
        with self._hashing:
            right = check_password(password, user.password if user else self._nobody)
        if not user or not right:
            return None
        text = base64.urlsafe_b64encode(f"{name}|{int(time.time())}|{secrets.token_hex(8)}".encode()).decode()
        return f"{text}.{self._sign(text, user)}"

    def user(self, cookie: str | None) -> User | None:
        """Whose cookie this is; None for a forged, an old or an orphaned one."""
        text, _, signature = (cookie or "").partition(".")
        try:
            name, made, _ = base64.urlsafe_b64decode(text.encode()).decode().split("|")
            age = time.time() - int(made)
        except (ValueError, UnicodeError):
            return None
        user = self._users.get(name)
        if user is None or not -60 <= age <= SESSION_SECONDS:
            return None
        return user if hmac.compare_digest(self._sign(text, user).encode(), signature.encode()) else None

    def _sign(self, text: str, user: User) -> str:
        return hmac.new(self._secret, f"{text}|{user.password}|{user.role}".encode(), hashlib.sha256).hexdigest()


def _hex(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) >= 8
    except ValueError:
        return False
