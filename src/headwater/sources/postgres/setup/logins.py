"""PostgreSQL logins for SQL that callers send: a reader and a writer, both weaker than the source's own role.

The source's role replicates, and may be a superuser. The logins have connections of their own: on a connection of the
source's role, a caller could undo `SET ROLE` by `RESET ROLE`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from headwater.errors import ConfigError, Forbidden
from headwater.model.principal import EDITOR, OWNER, VIEWER
from headwater.sources.postgres.connection import Connection, Server, quoted
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.doctor import Finding

NO_LOGINS = "viewers and editors cannot send SQL: postgres.reader and postgres.writer are not set"
SET_UP = "Set postgres.reader and postgres.writer; `headwater source setup` prints the SQL that creates them."

_POWERS = """
SELECT r.rolcanlogin, array_remove(ARRAY[
  CASE WHEN r.rolsuper THEN 'is a superuser' END,
  CASE WHEN r.rolcreaterole THEN 'can create roles' END,
  CASE WHEN r.rolcreatedb THEN 'can create databases' END,
  CASE WHEN r.rolreplication THEN 'has REPLICATION' END,
  CASE WHEN EXISTS (SELECT FROM pg_auth_members m WHERE m.member = r.oid) THEN 'is a member of other roles' END,
  CASE WHEN EXISTS (SELECT FROM pg_shdepend d WHERE d.refclassid = 'pg_authid'::regclass AND d.refobjid = r.oid
    AND d.deptype = 'o') THEN 'owns objects' END,
  CASE WHEN has_database_privilege(r.oid, current_database(), 'CREATE') THEN 'can create schemas' END,
  CASE WHEN EXISTS (SELECT FROM pg_namespace n
    WHERE n.nspname !~ '^pg_' AND has_schema_privilege(r.oid, n.oid, 'CREATE')) THEN 'can create objects' END,
  CASE WHEN EXISTS (SELECT FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace
    AND p.proacl IS NOT NULL AND has_function_privilege(r.oid, p.oid, 'EXECUTE')
    AND NOT has_function_privilege('public', p.oid, 'EXECUTE')) THEN 'may execute system functions' END,
  CASE WHEN has_table_privilege(r.oid, 'pg_catalog.pg_authid', 'SELECT') THEN 'can read password hashes' END,
  CASE WHEN EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
      AND (has_table_privilege(r.oid, c.oid, %(excess)s) OR has_any_column_privilege(r.oid, c.oid, %(columns)s)))
    THEN %(problem)s END], NULL)
FROM pg_roles r WHERE r.rolname = %(role)s
"""
_UNREADABLE = """
SELECT format('%%I.%%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
  AND c.relpersistence = 'p' AND NOT has_table_privilege(%s, c.oid, 'SELECT') ORDER BY 1
"""
_SCHEMAS = """
SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' ORDER BY 1
"""
_OWNERS = """
SELECT DISTINCT r.rolname, n.nspname FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
UNION SELECT current_user, 'public' ORDER BY 1, 2
"""


class Login(msgspec.Struct, frozen=True):
    """A role that runs callers' SQL, and its rights on tables."""

    role: str
    rights: str
    excess: str  # rights on tables that the role must not have


def reader(name: str) -> Login:
    """Return the login for queries and filters."""
    return Login(name, "SELECT", "INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER")


def writer(name: str) -> Login:
    """Return the login for editors' statements and transactions."""
    return Login(name, "SELECT, INSERT, UPDATE, DELETE", "TRUNCATE, REFERENCES, TRIGGER")


class Logins:
    """The source's own role and, if they are configured, the logins for callers."""

    def __init__(self, own: Server, config: PostgresConfig) -> None:
        self._callers: list[Login] = []
        self._servers = {OWNER: own, EDITOR: own, VIEWER: own}
        if config.reader and config.writer:
            self._callers = [reader(config.reader), writer(config.writer)]
            self._servers[VIEWER] = own.as_login(config.reader, _password(config.reader_password_file))
            self._servers[EDITOR] = own.as_login(config.writer, _password(config.writer_password_file))
        elif config.reader or config.writer:
            raise ConfigError("only one of postgres.reader and postgres.writer is set", hint=SET_UP)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the caller roles that have a login of their own."""
        return (VIEWER, EDITOR) if self._callers else ()

    def server(self, role: str) -> Server:
        """Return the address and login that run SQL of callers in `role`."""
        return self._servers[role]

    def check_sql(self, role: str) -> None:
        """Raise Forbidden if the SQL would run as the source's own role and the caller is not an owner."""
        if role != OWNER and not self._callers:
            raise Forbidden(
                "only owners may send SQL text: this PostgreSQL source has no logins for other callers",
                hint=f"Call a query that an owner prepared, or use feeds, rows and keys. Operators: {SET_UP}",
                role=OWNER,
            )

    def findings(self, connection: Connection) -> list[Finding]:
        """Return the problems of the logins, each with the SQL that fixes it."""
        if not self._callers:
            return [Finding(NO_LOGINS, f"-- {SET_UP}", fatal=False)]
        found = [each for login in self._callers for each in _login_findings(connection, login)]
        if not found:
            unreadable = [name for (name,) in connection.execute(_UNREADABLE, [self._callers[0].role])]
            roles = ", ".join(quoted(login.role) for login in self._callers)
            found += [
                Finding(
                    f"queries cannot read {name}: {self._callers[0].role!r} has no right to",
                    f"GRANT SELECT ON {name} TO {roles};",
                    fatal=False,
                )
                for name in unreadable
            ]
        return found

    def grants(self, table: str) -> list[str]:
        """Return the GRANT statements for a new table; `table` is its quoted name."""
        return [f"GRANT {login.rights} ON {table} TO {quoted(login.role)}" for login in self._callers]


def _login_findings(connection: Connection, login: Login) -> list[Finding]:
    columns = ", ".join(right for right in ("INSERT", "UPDATE", "REFERENCES") if right in login.excess)
    problem = f"has one of {login.excess} on a table"
    asked = {"excess": login.excess, "problem": problem, "role": login.role, "columns": columns}
    row = connection.execute(_POWERS, asked).fetchone()
    if row is None:
        return [Finding(f"there is no role {login.role!r}", f"-- {SET_UP}")]
    may_log_in, powers = row
    found = [] if may_log_in else [Finding(f"{login.role!r} may not log in", f"ALTER ROLE {quoted(login.role)} LOGIN;")]
    if powers:
        problem = f"the login {login.role!r} is too powerful for callers' SQL: it {', it '.join(powers)}"
        found.append(Finding(problem, "-- leave it only the rights that `headwater source setup` prints"))
    return found


def setup_sql(connection: Connection, reader_name: str, writer_name: str) -> list[str]:
    """Return the statements that create both logins and grant their rights on every schema of the database."""
    logins = [reader(reader_name), writer(writer_name)]
    database = quoted(connection.info.dbname)
    known = {name for (name,) in connection.execute("SELECT rolname FROM pg_roles")}
    lines = [f"CREATE ROLE {quoted(login.role)} LOGIN NOINHERIT;" for login in logins if login.role not in known]
    both = ", ".join(quoted(login.role) for login in logins)
    lines.append(f"GRANT CONNECT, TEMPORARY ON DATABASE {database} TO {both};")
    if connection.info.server_version < 150000:
        lines.append("REVOKE CREATE ON SCHEMA public FROM PUBLIC;")
    for (schema,) in connection.execute(_SCHEMAS).fetchall():
        lines.append(f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {both};")
        for login in logins:
            lines.append(f"GRANT {login.rights} ON ALL TABLES IN SCHEMA {quoted(schema)} TO {quoted(login.role)};")
        lines.append(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {quoted(schema)} TO {quoted(writer_name)};")
    for owner, schema in connection.execute(_OWNERS).fetchall():
        start = f"ALTER DEFAULT PRIVILEGES FOR ROLE {quoted(owner)} IN SCHEMA {quoted(schema)}"
        lines += [f"{start} GRANT {login.rights} ON TABLES TO {quoted(login.role)};" for login in logins]
        lines.append(f"{start} GRANT USAGE ON SEQUENCES TO {quoted(writer_name)};")
    return lines


def _password(file: str | None) -> str | None:
    return read_password(Path(file)) if file else None


def read_password(file: Path) -> str:
    """Return the password in `file`; raise ConfigError if other users can read the file."""
    try:
        with file.open(encoding="utf-8") as opened:
            mode, text = os.fstat(opened.fileno()).st_mode, opened.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the password file {file}: {error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"other users may read the password file {file}", hint=f"chmod 600 {file}")
    if not text:
        raise ConfigError(f"the password file {file} is empty")
    return text
