"""From source to log: the follow loop, its crash safety, and what it does when continuity is lost."""
