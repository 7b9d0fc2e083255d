"""Workers that die at random while messages arrive; and proof that the checker would detect errors."""
