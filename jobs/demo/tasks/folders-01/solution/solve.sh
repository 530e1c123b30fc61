#!/bin/bash
set -e
cd /app
mkdir delta lilac
