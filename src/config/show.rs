//! `config show`: every value with its origin. Secrets are never shown.

use super::{
    error::Location,
    layers::Entry,
    variables::{self, DefaultValue},
    Loaded,
};
use serde_json::{json, Map, Value};
use std::fmt::Write as _;

/// A line of `config show`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Variable.
    pub name: String,
    /// Its text, `<redacted>` for secrets, empty without a value.
    pub value: String,
    /// Where it comes from, for people.
    pub origin: String,
    /// The layer: `default`, `module`, `site`, `config`, `environment`, `flag`, `program`.
    pub layer: &'static str,
    /// Place in a file, for values of files.
    pub place: Option<Location>,
}

/// Shortest value that is taken for a secret inside other text: a shorter one would hide ordinary words.
pub const MIN_SECRET: usize = 6;

/// Replaces the value of a secret, and the password in an address.
pub fn redacted(name: &str, value: &str) -> String {
    if variables::is_secret(name) && !value.is_empty() {
        "<redacted>".into()
    } else {
        masked_url(value)
    }
}

/// `tcp://user:password@host` without the password.
pub fn masked_url(text: &str) -> String {
    let masked = text.split_once("://").and_then(|(scheme, rest)| {
        let end = rest.find('/').unwrap_or(rest.len());
        let (user, host) = rest[..end].rsplit_once('@')?;
        let (user, _) = user.split_once(':')?;
        Some(format!("{scheme}://{user}:<redacted>@{host}{}", &rest[end..]))
    });
    masked.unwrap_or_else(|| text.to_owned())
}

/// Every variable of the table, then everything else that was set. A secret that was copied into a
/// variable with an innocent name is removed as well.
pub fn rows(loaded: &Loaded) -> Vec<Row> {
    let secrets: Vec<&str> = loaded
        .layered
        .secrets()
        .filter(|s| s.len() >= MIN_SECRET)
        .collect();
    let clean = |name: &str, value: &str| {
        secrets.iter().fold(redacted(name, value), |text, secret| {
            text.replace(secret, "<redacted>")
        })
    };
    let from_table = |name: &str, value: &str, origin: String| Row {
        name: name.to_owned(),
        value: clean(name, value),
        origin,
        layer: "default",
        place: None,
    };
    let from_layer = |name: &str, entry: &Entry| Row {
        name: name.to_owned(),
        value: clean(name, &entry.text),
        origin: match &entry.written_as {
            Some(other) => format!("{} ({other})", entry.source),
            None => entry.source.to_string(),
        },
        layer: entry.source.layer(),
        place: entry.source.location().cloned(),
    };
    let kind = loaded.settings.run.kind;
    let known = variables::all()
        .filter(|variable| variable.is_for(kind))
        .map(|variable| {
            let name = variable.name;
            if let Some(entry) = loaded.layered.get(name) {
                return from_layer(name, entry);
            }
            match variable.default {
                DefaultValue::Value(text) => from_table(name, text, "default".into()),
                DefaultValue::Unset(meaning) => from_table(name, "", format!("not set: {meaning}")),
                DefaultValue::Required => from_table(name, "", "not set".into()),
                DefaultValue::Derived(how) => {
                    let value = loaded.derived.iter().find(|(derived, _)| *derived == name);
                    from_table(
                        name,
                        value.map_or("", |(_, text)| text),
                        format!("default: {how}"),
                    )
                }
            }
        });
    let other = loaded
        .layered
        .iter()
        .filter(|(name, _)| !variables::find(name).is_some_and(|variable| variable.is_for(kind)))
        .map(|(name, entry)| from_layer(name, entry));
    known.chain(other).collect()
}

/// The table for people.
pub fn text(loaded: &Loaded) -> String {
    let rows = rows(loaded);
    let width = |pick: fn(&Row) -> &str, cap: usize| {
        rows.iter()
            .map(|r| pick(r).chars().count())
            .max()
            .unwrap_or(0)
            .min(cap)
    };
    let (names, values) = (width(|r| &r.name, 60), width(|r| &r.value, 48));
    let mut out = String::new();
    for Row {
        name, value, origin, ..
    } in &rows
    {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<names$}  {value:<values$}  {origin}");
    }
    out
}

/// The same for machines: `{"NAME": {"value", "layer", "origin", "file", "line", "column"}, …}`. The value is
/// null where there is none, the place where the value is from no file.
pub fn json(loaded: &Loaded) -> String {
    let object = |row: Row| {
        let place = row.place.as_ref();
        let value = Some(row.value).filter(|text| !text.is_empty());
        let object = json!({
            "value": value,
            "layer": row.layer,
            "origin": row.origin,
            "file": place.map(|p| p.file.display().to_string()),
            "line": place.map(|p| p.line),
            "column": place.map(|p| p.column),
        });
        (row.name, object)
    };
    let map: Map<String, Value> = rows(loaded).into_iter().map(object).collect();
    let mut text = format!("{:#}", Value::Object(map));
    text.push('\n');
    text
}
