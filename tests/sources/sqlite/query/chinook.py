"""A music shop with the tables of Chinook, and twenty queries as an ordinary application asks them."""

from __future__ import annotations

SCHEMA = (
    "CREATE TABLE artist(artist_id INTEGER PRIMARY KEY, name TEXT)",
    "CREATE TABLE album(album_id INTEGER PRIMARY KEY, title TEXT NOT NULL, artist_id INTEGER NOT NULL)",
    "CREATE TABLE genre(genre_id INTEGER PRIMARY KEY, name TEXT)",
    "CREATE TABLE media_type(media_type_id INTEGER PRIMARY KEY, name TEXT)",
    """CREATE TABLE track(track_id INTEGER PRIMARY KEY, name TEXT NOT NULL, album_id INTEGER, media_type_id INTEGER
       NOT NULL, genre_id INTEGER, composer TEXT, milliseconds INTEGER NOT NULL, unit_price NUMERIC NOT NULL)""",
    "CREATE TABLE playlist(playlist_id INTEGER PRIMARY KEY, name TEXT)",
    """CREATE TABLE playlist_track(playlist_id INTEGER NOT NULL, track_id INTEGER NOT NULL,
       PRIMARY KEY (playlist_id, track_id)) WITHOUT ROWID""",
    """CREATE TABLE employee(employee_id INTEGER PRIMARY KEY, last_name TEXT NOT NULL, reports_to INTEGER,
       title TEXT)""",
    """CREATE TABLE customer(customer_id INTEGER PRIMARY KEY, first_name TEXT NOT NULL, last_name TEXT NOT NULL,
       country TEXT, email TEXT NOT NULL COLLATE NOCASE, support_rep_id INTEGER)""",
    """CREATE TABLE invoice(invoice_id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL, invoice_date TEXT NOT NULL,
       billing_country TEXT, total NUMERIC NOT NULL)""",
    """CREATE TABLE invoice_line(invoice_line_id INTEGER PRIMARY KEY, invoice_id INTEGER NOT NULL,
       track_id INTEGER NOT NULL, unit_price NUMERIC NOT NULL, quantity INTEGER NOT NULL)""",
)

# The query, and the places that are held to some of their rows, by table.
QUERIES: tuple[tuple[str, list[str]], ...] = (
    ("SELECT * FROM track WHERE track_id = ?", ["track"]),
    ("SELECT t.name, a.title FROM track t JOIN album a USING (album_id) WHERE a.album_id = :album", ["album", "track"]),
    (
        """SELECT ar.name, al.title FROM artist ar JOIN album al ON al.artist_id = ar.artist_id
        WHERE ar.artist_id = ? ORDER BY al.title""",
        ["album", "artist"],
    ),
    ("SELECT * FROM customer WHERE email = :email", ["customer"]),
    (
        """SELECT i.invoice_id, i.total FROM invoice i WHERE i.customer_id = ? ORDER BY i.invoice_date DESC LIMIT 10""",
        ["invoice"],
    ),
    (
        """SELECT l.quantity, t.name FROM invoice_line l JOIN track t ON t.track_id = l.track_id
        WHERE l.invoice_id = ?""",
        ["invoice_line"],
    ),
    (
        """SELECT t.name FROM playlist_track pt JOIN track t ON t.track_id = pt.track_id
        WHERE pt.playlist_id = ? ORDER BY t.name""",
        ["playlist_track"],
    ),
    (
        """SELECT g.name, count(*) FROM track t JOIN genre g ON g.genre_id = t.genre_id
        WHERE t.milliseconds > 300000 GROUP BY g.name ORDER BY 2 DESC""",
        ["track"],
    ),
    (
        """SELECT c.last_name, e.last_name AS rep FROM customer c LEFT JOIN employee e
        ON e.employee_id = c.support_rep_id WHERE c.country = 'Brazil'""",
        ["customer"],
    ),
    (
        """SELECT e.last_name FROM employee e WHERE NOT EXISTS (
        SELECT 1 FROM customer c WHERE c.support_rep_id = e.employee_id) AND e.title = 'Agent'""",
        ["customer", "employee"],
    ),
    ("SELECT count(*) FROM invoice WHERE billing_country = 'Norway'", ["invoice"]),
    ("SELECT country, count(*) FROM customer GROUP BY country ORDER BY country", []),
    ("SELECT DISTINCT composer FROM track WHERE genre_id IN (1, 2, 3)", ["track"]),
    (
        """SELECT name FROM track WHERE album_id IN (SELECT album_id FROM album WHERE artist_id = :artist)
        ORDER BY name""",
        ["album"],
    ),
    (
        """WITH spent AS (SELECT customer_id, count(*) AS n FROM invoice GROUP BY customer_id)
        SELECT c.email, s.n FROM customer c JOIN spent s ON s.customer_id = c.customer_id WHERE c.customer_id = ?""",
        ["customer", "invoice"],
    ),
    (
        """WITH RECURSIVE chain(id) AS (SELECT employee_id FROM employee WHERE employee_id = ?
        UNION SELECT e.employee_id FROM employee e JOIN chain ON e.reports_to = chain.id) SELECT id FROM chain""",
        ["employee"],
    ),
    ("SELECT name FROM artist WHERE name LIKE 'A%' ORDER BY name", []),
    (
        """SELECT first_name AS name FROM customer WHERE country = 'Chile'
        UNION SELECT last_name FROM employee WHERE title = 'Agent'""",
        ["customer", "employee"],
    ),
    (
        """SELECT t.name, (SELECT count(*) FROM invoice_line l WHERE l.track_id = t.track_id) AS sold
        FROM track t WHERE t.album_id = ? ORDER BY sold DESC""",
        ["track"],
    ),
    ("SELECT track_id, name FROM track ORDER BY milliseconds DESC LIMIT 5", []),
)
