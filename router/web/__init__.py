"""The page that the router serves to browsers."""
