"""A model cut over ranks: processes that each hold a part of every weight and compute that part of every product."""
