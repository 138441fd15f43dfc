"""What the chapters show: figures that read well everywhere, and widgets that live on a static page."""
