"""What came of a climb, for people: words, records, the folder it leaves and the HTML report."""
