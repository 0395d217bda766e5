"""The account of each kind of caller."""

from __future__ import annotations

import pytest

from headwater.model.principal import ADMIN, ANONYMOUS, JWT, VIEWER, Principal
from headwater.model.work.work_context import UNNAMED


def token(name: str, *, issuer: str = "", id: str = "") -> Principal:
    return Principal(name, VIEWER, credential=f"{JWT}{id}" if id else "", until=1, issuer=issuer)


def test_only_callers_without_a_credential_have_no_account_of_their_own() -> None:
    assert ANONYMOUS.account in UNNAMED
    for name in UNNAMED:
        for who in (Principal(name, credential="k1"), token(name), token(name, id="1"), Principal(name, VIEWER)):
            assert who.account not in UNNAMED, who


def test_callers_of_the_same_name_have_accounts_of_their_own() -> None:
    callers = [
        ADMIN,
        Principal("admin", credential="k1"),
        Principal("admin", credential="k2", until=1),
        token("admin"),
        token("admin", issuer="us"),
        token("admin", issuer="them"),
        token("k1"),
        Principal("x", credential="admin"),
    ]
    assert len({who.account for who in callers}) == len(callers)


@pytest.mark.parametrize("issuer", ["", "us"])
def test_tokens_of_one_subject_share_an_account(issuer: str) -> None:
    assert len({token("ann", issuer=issuer, id=id).account for id in ("", "1", "2")}) == 1
