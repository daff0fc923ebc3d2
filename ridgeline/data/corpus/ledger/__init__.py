"""What has been done of a build, so that it is done once, whatever stops it in between."""
