"""Set-up of a database for capture: checks, logins, inspection, removal."""
