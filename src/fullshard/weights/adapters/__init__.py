"""What inference engines ask of a publication beyond its own methods: one file per engine, which imports it on demand."""
