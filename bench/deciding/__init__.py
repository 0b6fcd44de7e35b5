"""Whether the cost model decides rightly: random chains, decisions, and what the compiler makes of them."""
