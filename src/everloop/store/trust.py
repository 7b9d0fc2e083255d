"""SQL for file marks and session grants. See `Store.mark_files` and `Store.grant`."""

MARK = """INSERT INTO file_mark (owner, digest, tainted, path, at) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET tainted = tainted AND excluded.tainted, path = excluded.path, at = excluded.at"""
MARKS = "SELECT digest, tainted FROM file_mark WHERE owner = ? AND digest IN (SELECT value FROM json_each(?))"
TAINTED = "SELECT path FROM file_mark WHERE owner = ? AND tainted ORDER BY at DESC LIMIT ?"
GRANT = "INSERT INTO session_grant (owner, key, name, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
GRANTS = "SELECT name FROM session_grant WHERE owner = ? AND key = ?"
REVOKE_GRANTS_OF = "DELETE FROM session_grant WHERE (owner, key) = (SELECT owner, key FROM session WHERE id = ?)"
REVOKE_GRANTS = "DELETE FROM session_grant WHERE owner = ? AND key = ?"
