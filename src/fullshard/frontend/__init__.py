"""The front end: the API of users."""
