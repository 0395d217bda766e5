CREATE TABLE prepared (
  id TEXT PRIMARY KEY,
  db TEXT NOT NULL,
  sql TEXT NOT NULL,
  form BLOB,  -- the JSON it was sent as, where it was
  name TEXT,
  role TEXT NOT NULL DEFAULT ''  -- highest role that prepared the query
) STRICT, WITHOUT ROWID;
INSERT INTO prepared VALUES('q_ekcb3gbthjehjcvkjk4yzkrx','main','SELECT 1',NULL,'one','viewer');
pragma user_version=2;
pragma application_id=1213682000;
