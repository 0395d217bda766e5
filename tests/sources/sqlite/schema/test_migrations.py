"""Real migration tools in their own processes, against a file that is being followed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sources.sqlite_source import Rig, schema_changes
from tests.suite.fork_server import fork_server

Attach = Callable[..., Rig]

SHOP = (
    "CREATE TABLE customer(id INTEGER PRIMARY KEY AUTOINCREMENT, name VARCHAR(30) NOT NULL, age INTEGER)",
    "INSERT INTO customer(name, age) VALUES ('Ada', 36), ('Bob', 40)",
)
ALEMBIC = """
import sys, sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

engine = sa.create_engine("sqlite:///" + sys.argv[1])
with engine.connect() as connection:
    context = MigrationContext.configure(connection, opts={"transactional_ddl": TRANSACTIONAL})
    op = Operations(context)
    with context.begin_transaction():
        STEPS
    connection.commit()
engine.dispose()
"""
STEPS = {
    "add_column": "op.add_column('customer', sa.Column('city', sa.String(20), server_default='x'))",
    "batch alter": "with op.batch_alter_table('customer') as b: b.alter_column('name', type_=sa.String(99))",
    "batch drop": "with op.batch_alter_table('customer') as b: b.drop_column('age')",
    "batch add and unique": "with op.batch_alter_table('customer') as b: "
    "b.add_column(sa.Column('mail', sa.String)); b.create_unique_constraint('u', ['name'])",
    "batch rename": "with op.batch_alter_table('customer') as b: b.alter_column('name', new_column_name='title')",
    "recreate": "with op.batch_alter_table('customer', recreate='always') as b: "
    "b.add_column(sa.Column('z', sa.Integer))",
    "new table": "op.create_table('item', sa.Column('id', sa.Integer, primary_key=True)); "
    "op.execute('INSERT INTO item VALUES (7)')",
    "rename table": "op.rename_table('customer', 'client')",
    "data": "op.add_column('customer', sa.Column('n', sa.Integer)); op.execute('UPDATE customer SET n = 5')",
}
REBUILDS = {"batch alter", "batch drop", "batch add and unique", "batch rename", "recreate"}


LOADED = ("alembic.migration", "alembic.operations", "django.db.migrations.executor", "sqlalchemy.dialects.sqlite")


def migrate(code: str, path: Path, *more: str) -> None:
    done = fork_server(*LOADED).run({"code": code}, [path, *more], env=os.environ, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def prove_still_followed(r: Rig, table: str) -> None:
    """Check that every write after the migration is captured as a change."""
    names = [name.decode() for (name,) in r.foreign.run("SELECT name FROM pragma_table_info(?)", table)]
    text = "title" if "title" in names else "name"
    r.foreign.script(f"UPDATE {table} SET {text} = {text} || '!'", f"DELETE FROM {table} WHERE id = 2")
    assert len(r.check()) == 3
    assert r.write(f"DELETE FROM {table}") == [""]
    r.check()


@pytest.mark.slow
@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_alembic_migration_is_followed(rig: Attach, database: Path, step: str, transactional: bool) -> None:
    r = rig(*SHOP)
    r.foreign.run("UPDATE customer SET age = age + 1")
    migrate(ALEMBIC.replace("STEPS", STEPS[step]).replace("TRANSACTIONAL", str(transactional)), database)
    changes = schema_changes(r.settle())
    resnapshot = {change.table.name for change in changes if change.resnapshot}
    assert changes
    if step in REBUILDS or step == "data":
        assert "customer" in resnapshot
    prove_still_followed(r, "client" if step == "rename table" else "customer")
    assert not any("alembic_tmp" in name for name in r.captured())


DJANGO = """
import sys
import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    INSTALLED_APPS=[], DEFAULT_AUTO_FIELD="django.db.models.AutoField", USE_TZ=True,
)
django.setup()
from django.db import connection, migrations, models
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.migration import Migration
from django.db.migrations.state import ProjectState

class Start(Migration):
    operations = [migrations.CreateModel("customer", [
        ("id", models.AutoField(primary_key=True)), ("name", models.CharField(max_length=30)),
        ("age", models.IntegerField(null=True))], options={"db_table": "customer"})]

class Next(Migration):
    operations = OPERATIONS

state = Start("start", "shop").mutate_state(ProjectState(), preserve=False)
if sys.argv[2] == "start":
    with connection.schema_editor() as editor:
        Start("start", "shop").apply(ProjectState(), editor)
else:
    with connection.schema_editor(atomic=True) as editor:
        Next("next", "shop").apply(state, editor)
connection.close()
"""
OPERATIONS = {
    "AddField null": "[migrations.AddField('customer', 'city', models.TextField(null=True))]",
    "AddField default": "[migrations.AddField('customer', 'city', models.TextField(default='x'))]",
    "AlterField": "[migrations.AlterField('customer', 'name', models.CharField(max_length=99, unique=True))]",
    "RenameField": "[migrations.RenameField('customer', 'name', 'title')]",
    "several": "[migrations.AddField('customer', 'n', models.IntegerField(default=0)), "
    "migrations.RunSQL('UPDATE customer SET n = 7'), "
    "migrations.AlterField('customer', 'age', models.TextField(default='?'))]",
    "RemoveField of a rebuild": "[migrations.AlterField('customer', 'age', models.IntegerField(unique=True)), "
    "migrations.RemoveField('customer', 'age')]",
    "CreateModel": "[migrations.CreateModel('item', [('id', models.AutoField(primary_key=True))])]",
    "RenameModel": "[migrations.AlterModelTable('customer', 'client')]",
}


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_django_migration_is_followed(rig: Attach, database: Path, operation: str) -> None:
    code = DJANGO.replace("OPERATIONS", OPERATIONS[operation])
    migrate(code, database, "start")
    r = rig(SHOP[1])
    r.foreign.run("UPDATE customer SET age = age + 1")
    migrate(code, database, "next")
    changes = r.settle()
    assert schema_changes(changes)
    if operation in ("AlterField", "AddField default", "several", "RemoveField of a rebuild"):
        assert any(change.resnapshot and change.table.name == "customer" for change in schema_changes(changes))
    prove_still_followed(r, "client" if operation == "RenameModel" else "customer")
    assert set(r.captured()) <= {"customer", "client", "item", "shop_item", "sqlite_sequence"}


@pytest.mark.slow
def test_django_dropping_a_column_fails_in_sqlite_and_changes_nothing(rig: Attach, database: Path) -> None:
    code = DJANGO.replace("OPERATIONS", "[migrations.RemoveField('customer', 'age')]")
    migrate(code, database, "start")
    r = rig(SHOP[1])
    with pytest.raises(AssertionError, match="error in trigger _headwater_"):
        migrate(code, database, "next")
    assert r.check() == []
    assert r.write("ALTER TABLE customer DROP COLUMN age") == [""]  # the way that works
    assert [change.resnapshot for change in r.check()] == [False]
    prove_still_followed(r, "customer")


@pytest.mark.slow
def test_migration_during_capture_is_followed(rig: Attach, database: Path) -> None:
    r = rig(*SHOP)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            ALEMBIC.replace("STEPS", STEPS["recreate"]).replace("TRANSACTIONAL", "False"),
            str(database),
        ]
    )
    while process.poll() is None:
        r.pull()
    assert process.returncode == 0
    r.settle()
    prove_still_followed(r, "customer")
