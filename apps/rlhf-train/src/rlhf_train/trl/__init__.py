"""`--backend trl`: the same settings and rows through TRL's own trainer."""
