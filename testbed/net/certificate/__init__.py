"""Whether a link is what it claims: what to measure, what an exact link would show, and the verdict."""
