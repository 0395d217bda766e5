"""URLs without their passwords and other secrets."""

import pytest

from headwater.model.url_secrets import has_secrets, without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:tiger@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://:tiger@host/db", "postgresql://:***@host/db"),
        ("postgresql://me:ti/ger@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:ti@ger@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:ti?ger@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@corp:tiger@host/db", "postgresql://me@corp:***@host/db"),
        ("postgresql:///db?user=me&password=tiger", "postgresql:///db?user=me&password=***"),
        ("postgresql://h/db?PASSWORD=tiger&sslmode=require", "postgresql://h/db?PASSWORD=***&sslmode=require"),
        ("postgresql://h/db?pass%77ord=tiger", "postgresql://h/db?pass%77ord=***"),
        ("postgresql://h/db?password=ti=ger;tiger?tiger tiger", "postgresql://h/db?password=***"),
        ("postgresql://h/db?sslpassword=tiger&passfile=/p", "postgresql://h/db?sslpassword=***&passfile=/p"),
        ("postgresql://h/db?oauth_client_secret=tiger", "postgresql://h/db?oauth_client_secret=***"),
        ("postgresql://h/db?scram_client_key=tiger", "postgresql://h/db?scram_client_key=***"),
        ("postgresql://h/db?options=-c app.token=tiger", "postgresql://h/db?options=-c app.token=***"),
        ("mysql://me:tiger@h/db?passwd=tiger&charset=utf8mb4", "mysql://me:***@h/db?passwd=***&charset=utf8mb4"),
        ("jdbc:sqlserver://h;user=me;password=tiger", "jdbc:sqlserver://h;user=me;password=***"),
        ("host=h password=tiger", "host=h password=***"),
    ],
)
def test_secrets_of_a_url_are_masked(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    assert has_secrets(url) and not has_secrets(shown)


@pytest.mark.parametrize(
    "url",
    [
        "app.db",
        "sqlite:///data/app.db?cache=shared",
        "postgresql://me@host:5432/db?sslmode=require&passfile=/p&sslkey=/k&require_auth=scram-sha-256",
        "postgresql://me@host:5432/db?application_name=a@b",
        "postgresql://[::1]:5432/db",
        "",
    ],
)
def test_url_without_secrets_is_unchanged(url: str) -> None:
    assert without_secrets(url) == url and not has_secrets(url)
