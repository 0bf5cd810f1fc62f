"""From the LOCAL program to what ranks execute."""
