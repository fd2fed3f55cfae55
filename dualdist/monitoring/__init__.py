"""Who is late, lost or slow, and what the others say of it."""
