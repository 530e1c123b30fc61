//! Variables of tasks that come from the host.

use super::TaskError;
use std::{collections::BTreeMap, path::Path};

/// Fills in values that are a whole `${VAR}` or `${VAR:-default}`; every other value stays as it is.
/// `lookup` gives the host's variables, `file` and `section` name the place in errors.
pub fn resolve_env(
    env: &BTreeMap<String, String>,
    file: &Path,
    section: &str,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<BTreeMap<String, String>, TaskError> {
    env.iter()
        .map(|(key, value)| {
            let Some((name, default)) = template(value) else {
                return Ok((key.clone(), value.clone()));
            };
            match lookup(name).or_else(|| default.map(str::to_owned)) {
                Some(found) => Ok((key.clone(), found)),
                None => Err(TaskError::Folder {
                    path: file.to_owned(),
                    problem: format!(
                        "`{section}.{key}` takes the variable {name} from the host, where it is not set; \
                         set it or write ${{{name}:-default}}"
                    ),
                }),
            }
        })
        .collect()
}

fn template(value: &str) -> Option<(&str, Option<&str>)> {
    let body = value.strip_prefix("${")?.strip_suffix('}')?;
    let (name, default) = match body.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (body, None),
    };
    (!name.is_empty() && !name.contains(['}', ':'])).then_some((name, default))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_values_are_templates() {
        let env = |value: &str| BTreeMap::from([("K".to_owned(), value.to_owned())]);
        let host = |name: &str| (name == "SET").then(|| "host".to_owned());
        let resolve = |value: &str| {
            resolve_env(&env(value), Path::new("task.toml"), "verifier.env", host).map(|m| m["K"].clone())
        };
        assert_eq!(resolve("${SET}").unwrap(), "host");
        assert_eq!(resolve("${SET:-x}").unwrap(), "host");
        assert_eq!(resolve("${UNSET:-a b}").unwrap(), "a b");
        assert_eq!(resolve("${UNSET:-}").unwrap(), "");
        assert_eq!(resolve("pre-${SET}").unwrap(), "pre-${SET}");
        let error = resolve("${UNSET}").unwrap_err().to_string();
        assert!(
            error.contains("verifier.env.K") && error.contains("UNSET"),
            "{error}"
        );
    }
}
