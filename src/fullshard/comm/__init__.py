"""Transport: collectives, streams and process groups. Nothing here depends on parameters, units or steps."""
