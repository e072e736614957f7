"""Wire formats of SPES: records, their canonical bytes, their limits and errors. Depends on msgpack alone."""
