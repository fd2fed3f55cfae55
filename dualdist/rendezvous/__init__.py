"""How the ranks of a job find each other, and which backend they open."""
