"""From a captured graph to compiled programs: the Dynamo backend and the settings it works with."""
