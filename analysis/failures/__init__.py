"""What failures cost: attempts that did not complete, and how soon they were repeated."""
