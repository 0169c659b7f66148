"""Computing only the rows that count: padding, ignored labels and unread positions are left out before autograd."""
