//! `$(date +FORMAT)`.

use super::super::error::{LanguageError, Location};
use super::cursor::fail_at;
use chrono::{
    format::{Item, StrftimeItems},
    DateTime, Local, Utc,
};
use std::time::SystemTime;

/// The moment `now` in the given format (without its `+`), in local time or UTC.
pub(super) fn format(
    now: SystemTime,
    utc: bool,
    format: &str,
    location: &Location,
) -> Result<String, LanguageError> {
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.iter().any(|item| matches!(item, Item::Error)) {
        return fail_at(
            location.clone(),
            format!("`+{format}` is not a date format"),
            "use letters such as %Y %m %d %H %M %S %j %s, and %% for a percent sign",
        );
    }
    Ok(if utc {
        DateTime::<Utc>::from(now)
            .format_with_items(items.iter())
            .to_string()
    } else {
        DateTime::<Local>::from(now)
            .format_with_items(items.iter())
            .to_string()
    })
}
