"""What `table` is put together from: one module for each family, each with a tuple ENTRIES. No torch here."""
