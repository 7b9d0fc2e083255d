"""Workers that die at random while messages pour in; and proof that the checker would see it go wrong."""
