//! What people look at: the page at `/dashboard` and the data it shows. Owner: the HTTP layer. Invariant: nothing here asks
//! an actor; everything comes from what actors have said, and a slow reader costs the server nothing.
