CREATE TABLE cut (
  db TEXT NOT NULL,
  tab TEXT NOT NULL,
  generation TEXT NOT NULL,
  version INTEGER NOT NULL,
  target INTEGER NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (db, tab)
) STRICT, WITHOUT ROWID;
INSERT INTO cut VALUES('main','t','g',1,100,0);
CREATE TABLE lease (
  db TEXT NOT NULL,
  subscriber TEXT NOT NULL,
  tab TEXT NOT NULL,
  range INTEGER NOT NULL,
  generation TEXT NOT NULL,
  kept INTEGER NOT NULL,
  until_ms INTEGER NOT NULL,
  owner TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (db, subscriber, tab, range)
) STRICT, WITHOUT ROWID;
INSERT INTO lease VALUES('main','me','t',0,'g',5,2000000000000,'ann');
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES('next_id',3);
CREATE TABLE range (
  id INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  db TEXT NOT NULL,
  tab TEXT NOT NULL,
  live INTEGER NOT NULL,
  start BLOB NOT NULL,
  end BLOB,
  rows INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  PRIMARY KEY (id, epoch)
) STRICT, WITHOUT ROWID;
INSERT INTO "range" VALUES(1,1,'main','t',1,X'',X'6D',5,50);
INSERT INTO "range" VALUES(2,1,'main','t',1,X'6D',NULL,5,50);
CREATE INDEX range_of ON range (db, tab, live);
pragma user_version=2;
pragma application_id=1213682247;
