CREATE TABLE chunk (
  id TEXT NOT NULL,
  run INTEGER NOT NULL,
  number INTEGER NOT NULL,
  tab TEXT NOT NULL,
  end BLOB NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (id, run, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES('next_id',1);
CREATE TABLE stand (
  db TEXT NOT NULL,
  instance TEXT NOT NULL,
  prefix TEXT NOT NULL,
  last INTEGER NOT NULL,
  through INTEGER NOT NULL,
  PRIMARY KEY (db, instance)
) STRICT, WITHOUT ROWID;
INSERT INTO stand VALUES('main','q1','p',3,9);
CREATE TABLE subscription (
  id TEXT PRIMARY KEY,
  db TEXT NOT NULL,
  name TEXT,
  owner TEXT NOT NULL,
  options TEXT NOT NULL,
  created_ms INTEGER NOT NULL,
  acked INTEGER NOT NULL,
  quiet INTEGER NOT NULL,
  paused INTEGER NOT NULL,
  snapshot TEXT,  -- without its chunks
  UNIQUE (db, name)
) STRICT, WITHOUT ROWID;
INSERT INTO subscription VALUES('sub_0000000000000000','main','mine','ann','{"db":"main","tables":["t"]}',1234,7,7,1,'{"tables":["t"]}');
CREATE INDEX subscription_owner ON subscription (owner);
pragma user_version=1;
pragma application_id=1213682498;
