//! `config show`: every value with its origin. Secrets are never shown.

use super::{
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
    /// Where it comes from.
    pub origin: String,
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
    let row = |name: &str, value: &str, origin: String| Row {
        name: name.to_owned(),
        value: secrets.iter().fold(redacted(name, value), |text, secret| {
            text.replace(secret, "<redacted>")
        }),
        origin,
    };
    let origin = |entry: &Entry| match &entry.written_as {
        Some(name) => format!("{} ({name})", entry.source),
        None => entry.source.to_string(),
    };
    let known = variables::all()
        .filter(|variable| variable.is_for(loaded.settings.run.kind))
        .map(|variable| {
            let name = variable.name;
            if let Some(entry) = loaded.layered.get(name) {
                return row(name, &entry.text, origin(entry));
            }
            match variable.default {
                DefaultValue::Value(text) => row(name, text, "default".into()),
                DefaultValue::Unset(meaning) => row(name, "", format!("not set: {meaning}")),
                DefaultValue::Required => row(name, "", "not set".into()),
                DefaultValue::Derived(how) => {
                    let value = loaded.derived.iter().find(|(derived, _)| *derived == name);
                    row(
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
        .filter(|(name, _)| variables::find(name).is_none())
        .map(|(name, entry)| row(name, &entry.text, origin(entry)));
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
    for Row { name, value, origin } in &rows {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<names$}  {value:<values$}  {origin}");
    }
    out
}

/// The same for machines: `{"NAME": {"value": …, "origin": …}, …}`.
pub fn json(loaded: &Loaded) -> String {
    let map: Map<String, Value> = rows(loaded)
        .into_iter()
        .map(|row| (row.name, json!({"value": row.value, "origin": row.origin})))
        .collect();
    let mut text = format!("{:#}", Value::Object(map));
    text.push('\n');
    text
}
