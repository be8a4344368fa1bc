"""Nothing of it is needed where one program runs after another."""
