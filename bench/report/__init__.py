"""Result files as tables and charts: on the terminal, as Markdown, as one HTML file."""
