"""Passwords, the users file, the throttle and the cookie."""

import base64
import time

import pytest

from labeling.annotate import auth
from labeling.annotate.auth import Sessions, Throttle, User, check_password, hash_password, read_users
from prm import DataError


def test_a_hash_is_salted_slow_to_make_and_checks():
    one, two = hash_password("pässword"), hash_password("pässword")
    assert one != two and one.startswith("scrypt:") and "word" not in one
    assert check_password("pässword", one) and check_password("pässword", two)
    assert not check_password("password", one) and not check_password("", one)
    with pytest.raises(DataError):
        hash_password("")


def test_the_users_file(tmp_path):
    path = tmp_path / "users.toml"
    path.write_text(f'[ana]\npassword = "{hash_password("x")}"\n["bo@x.org"]\npassword = "{hash_password("y")}"\n'
                    'role = "reviewer"\n')
    found = read_users(str(path))
    assert {name: user.role for name, user in found.items()} == {"ana": "annotator", "bo@x.org": "reviewer"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names nobody"),
        ("[ana", "not TOML"),
        ("ana = 3", "expected a table"),
        ("[ana]", "expected a table"),
        ('[ana]\npassword = "secret"', "--hash-password"),
        ('[ana]\npassword = "scrypt:zz:00"', "--hash-password"),
        ('[ana]\npassword = "{hash}"\nrole = "king"', "role must be"),
        ('[ana]\npassword = "{hash}"\nadmin = true', "expected a table"),
        ('["a/../b"]\npassword = "{hash}"', "a name is"),
    ],
)
def test_a_bad_users_file_is_named(tmp_path, text, reason):
    path = tmp_path / "users.toml"
    path.write_text(text.replace("{hash}", "scrypt:" + "00" * 16 + ":" + "11" * 32))
    with pytest.raises(DataError, match=f"users.toml.*{reason}"):
        read_users(str(path))


def test_a_missing_users_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.toml"):
        read_users(str(tmp_path / "none.toml"))


@pytest.fixture
def users():
    return {"ana": User("ana", hash_password("a")), "bo": User("bo", hash_password("b"), "reviewer")}


def test_the_cookie_outlives_a_restart_and_no_forgery_passes(users):
    secret = b"s" * 32
    cookie = Sessions(secret, users).sign_in("ana", "a")
    assert Sessions(secret, users).sign_in("ana", "b") is None
    assert Sessions(secret, users).sign_in("nobody", "a") is None
    again = Sessions(secret, users)
    assert again.user(cookie).name == "ana"
    text, _, signature = cookie.partition(".")
    other = base64.urlsafe_b64encode(base64.urlsafe_b64decode(text).replace(b"ana", b"bo")).decode()
    for forged in ("", "x", None, ".", f"{other}.{signature}", f"{text}.{'0' * 64}", text, "é.é", f"{text}.é"):
        assert again.user(forged) is None
    assert Sessions(b"t" * 32, users).user(cookie) is None
    assert Sessions(secret, users | {"ana": User("ana", hash_password("new"))}).user(cookie) is None
    assert Sessions(secret, users | {"ana": User("ana", users["ana"].password, "reviewer")}).user(cookie) is None
    assert Sessions(secret, {"bo": users["bo"]}).user(cookie) is None


def test_the_cookie_ends(users, monkeypatch):
    sessions = Sessions(b"s" * 32, users)
    cookie = sessions.sign_in("ana", "a")
    later = time.time() + auth.SESSION_SECONDS + 1
    monkeypatch.setattr(auth.time, "time", lambda: later)
    assert sessions.user(cookie) is None


def test_guesses_are_slowed_by_name_and_by_address(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: clock[0])
    throttle = Throttle()
    heard = [throttle.wait("name:ana", f"from:{n}") for n in range(8)]
    assert heard[:5] == [0.0] * 5 and min(heard[5:]) > 0
    assert throttle.wait("name:bo", "from:9") == 0.0
    waits = []
    for _ in range(12):
        clock[0] += throttle.wait("name:ana", "from:77") + 0.01
        assert throttle.wait("name:ana", "from:77") == 0.0
        waits.append(throttle.wait("name:ana", "from:77"))
    assert waits == sorted(waits) and waits[-1] == pytest.approx(300, abs=1)
    throttle.passed("name:ana")
    assert throttle.wait("name:ana", "from:5") == 0.0
