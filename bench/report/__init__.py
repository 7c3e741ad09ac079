"""Result files as tables and pictures: on the terminal, as Markdown, as one HTML file."""
