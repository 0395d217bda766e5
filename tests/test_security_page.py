"""The examples of docs/security.md are accepted: the token it makes, and the settings of a public host."""

import json
import subprocess
import sys
from pathlib import Path

from tests.doc_pages import blocks, page

from headwater.model.principal import VIEWER, Scope
from headwater.serve.auth.gate import is_loopback, split_address
from headwater.serve.auth.json_web_tokens import Jwts
from headwater.settings import load

PAGE = page("docs/security.md")
SECRET = "s" * 32
SCOPES = (Scope("shop", ("orders",)), Scope("stock"))


def test_token_made_by_the_documented_program_is_trusted() -> None:
    ((_, body),) = blocks(PAGE, "python")
    environment = {"HEADWATER_JWT_SECRET": SECRET}
    done = subprocess.run(
        [sys.executable, "-c", body], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    who = Jwts(secret=SECRET.encode()).check(done.stdout.strip().encode())
    assert (who.name, who.role, who.scopes) == ("reports", VIEWER, SCOPES) and who.until is not None


def test_documented_claims_equal_the_claims_of_the_documented_program() -> None:
    ((_, shown),) = blocks(PAGE, "json")
    ((_, made),) = blocks(PAGE, "python")
    claims = json.loads(shown)
    assert claims.keys() == {"sub", "exp", "role", "scopes"}
    assert all(json.dumps(value) in made for name, value in claims.items() if name != "exp")


def test_documented_settings_of_a_public_host_are_loaded(tmp_path: Path) -> None:
    ((_, body),) = blocks(PAGE, "toml")
    (tmp_path / "headwater.toml").write_text(body)
    found = load(file=tmp_path / "headwater.toml", environ={}, flags={}).serve
    assert not is_loopback(split_address(found.http)[0]) and found.grpc == "off"
    assert found.tls_cert and found.tls_key and found.rate and "*" not in found.cors_origins
