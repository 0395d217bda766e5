CREATE TABLE block (
  first INTEGER PRIMARY KEY,
  count INTEGER NOT NULL,
  ts_first INTEGER NOT NULL,
  ts_last INTEGER NOT NULL,
  commit_ms_last INTEGER NOT NULL,
  position TEXT NOT NULL,
  id_first TEXT NOT NULL,
  id_last TEXT NOT NULL,
  whole INTEGER,          -- first offset here at which a transaction begins
  ends INTEGER NOT NULL,  -- 1: the last change here is the last of its transaction
  schemas TEXT NOT NULL,  -- numbers of the table definitions used
  bytes INTEGER NOT NULL,
  raw INTEGER NOT NULL,   -- bytes before compression
  codec INTEGER NOT NULL,
  crc INTEGER NOT NULL,   -- of data as stored
  data BLOB NOT NULL
) STRICT;
INSERT INTO block VALUES(1,2,1,1,0,'p2','t1','t1',1,1,'1',40,40,0,3533037722,X'9D00C3910291A274319101910091A27032C40201019092C0C0929201A36E65779202A36E65778090');
INSERT INTO block VALUES(3,1,3,3,0,'p3','t3','t3',3,1,'1',32,32,0,1215695455,X'9D00C3910191A274339103910091A27033C401019091C0919203A36E65778090');
CREATE INDEX block_time ON block (ts_first, first, bytes);
CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES('begun',1);
INSERT INTO meta VALUES('ceiling',99);
INSERT INTO meta VALUES('generation','6488389194dfce8d');
INSERT INTO meta VALUES('horizon',1);
INSERT INTO meta VALUES('merged',0);
INSERT INTO meta VALUES('reason','created');
CREATE TABLE note (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO note VALUES('nonce','x');
CREATE TABLE schema (
  number INTEGER PRIMARY KEY, name TEXT NOT NULL, version INTEGER NOT NULL, definition TEXT NOT NULL,
  UNIQUE (name, version, definition)
) STRICT;
INSERT INTO schema VALUES(1,'orders',1,'{"name":"orders","columns":[{"name":"id","kind":"i64","nullable":false},{"name":"note","kind":"str"}],"key":["id"]}');
CREATE TABLE evicted (name TEXT PRIMARY KEY, upto INTEGER NOT NULL) STRICT, WITHOUT ROWID;
pragma user_version=2;
pragma application_id=1213680711;
