//! HTTP headers of MCP servers: a file that is passed around must name credentials, never hold them.

/// True for names of variables and headers that carry a credential.
fn is_sensitive(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    ["KEY", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH"]
        .iter()
        .any(|word| name.contains(word))
        || name
            .match_indices("TOKEN")
            .any(|(at, word)| !name[at + word.len()..].starts_with('S'))
}

/// One piece of a header value.
enum Piece<'a> {
    Text(&'a str),
    /// `${NAME}` or `${NAME:-default}`.
    Variable {
        name: &'a str,
        default: Option<&'a str>,
    },
}

fn pieces(value: &str) -> Vec<Piece<'_>> {
    let mut found = Vec::new();
    let mut rest = value;
    let mut text_from = value;
    while let Some(start) = rest.find("${") {
        let inner = &rest[start + 2..];
        let parsed = inner.find('}').and_then(|end| {
            let body = &inner[..end];
            let (name, default) = match body.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (body, None),
            };
            let valid = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            valid.then_some((name, default, end))
        });
        match parsed {
            Some((name, default, end)) => {
                let text = &text_from[..text_from.len() - rest.len() + start];
                if !text.is_empty() {
                    found.push(Piece::Text(text));
                }
                found.push(Piece::Variable { name, default });
                rest = &inner[end + 1..];
                text_from = rest;
            }
            None => rest = inner,
        }
    }
    if !text_from.is_empty() {
        found.push(Piece::Text(text_from));
    }
    found
}

/// Checks one header.
pub(super) fn check(name: &str, value: &str) -> Result<(), String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+.^_`|~-".contains(c);
    if name.is_empty() || !name.chars().all(is_name) {
        return Err(format!("`{name}` is not an HTTP header name"));
    }
    if value.contains(['\r', '\n']) {
        return Err(format!("header `{name}` must not contain a line break"));
    }
    let lower = name.to_ascii_lowercase();
    let sensitive = is_sensitive(name) || lower == "cookie" || lower == "set-cookie";
    let pieces = pieces(value);
    let has_default = pieces.iter().any(|piece| {
        matches!(piece, Piece::Variable { name, default: Some(default) }
            if !default.is_empty() && (sensitive || is_sensitive(name)))
    });
    if has_default || (sensitive && !value.trim().is_empty() && !is_reference(&pieces)) {
        return Err(format!(
            "header `{name}` must take its credential from a variable without a default, as in `Bearer ${{TOKEN}}`"
        ));
    }
    Ok(())
}

/// An optional scheme word, then variables joined by nothing but spaces, `:` and `-`.
fn is_reference(pieces: &[Piece<'_>]) -> bool {
    let first = pieces
        .iter()
        .position(|piece| matches!(piece, Piece::Variable { .. }));
    let last = pieces
        .iter()
        .rposition(|piece| matches!(piece, Piece::Variable { .. }));
    let (Some(first), Some(last)) = (first, last) else {
        return false;
    };
    pieces.iter().enumerate().all(|(i, piece)| match piece {
        Piece::Variable { .. } => true,
        Piece::Text(text) if i < first => {
            let word = text.trim();
            word.is_empty()
                || (word.chars().all(|c| c.is_ascii_alphabetic()) && text.ends_with(char::is_whitespace))
        }
        Piece::Text(text) if i > last => text.trim().is_empty(),
        Piece::Text(text) => text.chars().all(|c| c.is_whitespace() || c == ':' || c == '-'),
    })
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn credentials_must_be_references() {
        for (name, value) in [
            ("Authorization", "Bearer ${TOKEN}"),
            ("Authorization", "${ID}:${SECRET}"),
            ("X-Trace", "plain text"),
            ("X-Max-Tokens", "5"),
            ("X-Api-Key", ""),
            ("X-Region", "${REGION:-eu}"),
        ] {
            assert_eq!(check(name, value), Ok(()), "{name}: {value}");
        }
        for (name, value) in [
            ("Authorization", "Bearer abc"),
            ("Cookie", "id=5"),
            ("Authorization", "Bearer ${TOKEN:-abc}"),
            ("X-Trace", "${MY_SECRET:-abc}"),
            ("bad name", "x"),
            ("X-A", "a\nb"),
        ] {
            assert!(check(name, value).is_err(), "{name}: {value}");
        }
    }
}
